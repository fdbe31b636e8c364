"""LiteLLM, for which a farm is a server with OpenAI's protocol."""

import json
import sys

import litellm

url, key, model = sys.argv[1:]
answer = litellm.embedding(
    model=f"openai/{model}", api_base=f"{url}/v1", api_key=key, input=json.load(sys.stdin)
)
json.dump([each["embedding"] for each in answer.data], sys.stdout)
