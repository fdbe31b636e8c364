"""Chroma: a collection that has its texts embedded, and finds each by itself."""

import json
import sys

import chromadb
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

url, key, model = sys.argv[1:]
texts = json.load(sys.stdin)
function = OpenAIEmbeddingFunction(api_key=key, api_base=f"{url}/v1", model_name=model)
collection = chromadb.EphemeralClient().create_collection("texts", embedding_function=function)
ids = [str(number) for number in range(len(texts))]
collection.add(ids=ids, documents=texts)
assert collection.query(query_texts=texts, n_results=1)["ids"] == [[each] for each in ids]
json.dump(collection.get(ids=ids, include=["embeddings"])["embeddings"].tolist(), sys.stdout)
