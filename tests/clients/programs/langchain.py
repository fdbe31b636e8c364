"""LangChain: with its defaults an error that says what to set, with that set the vectors."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

# The tokens that it makes by default are OpenAI's, whose table LiteLLM carries: none is downloaded.
table = Path(find_spec("litellm").origin).parent / "litellm_core_utils" / "tokenizers"
os.environ["TIKTOKEN_CACHE_DIR"] = str(table)

import openai
from langchain_openai import OpenAIEmbeddings

url, key, model = sys.argv[1:]
texts = json.load(sys.stdin)
where = {"base_url": f"{url}/v1", "api_key": key, "model": model}
try:
    OpenAIEmbeddings(**where).embed_documents(texts)
except openai.BadRequestError as error:
    assert "check_embedding_ctx_length=False" in str(error), error
else:
    raise AssertionError("token ids of another tokenizer were taken")
client = OpenAIEmbeddings(**where, check_embedding_ctx_length=False)
json.dump([*client.embed_documents(texts[1:]), client.embed_query(texts[0])], sys.stdout)
