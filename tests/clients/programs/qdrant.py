"""Qdrant: a collection of points with vectors of OpenAI's client, of which each finds itself."""

import json
import sys

import openai
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams

url, key, model = sys.argv[1:]
texts = json.load(sys.stdin)
with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as source:
    answer = source.embeddings.create(model=model, input=texts)
vectors = [each.embedding for each in answer.data]
client = QdrantClient(":memory:")
size = len(vectors[0])
client.create_collection("texts", VectorParams(size=size, distance=Distance.COSINE))
client.upsert("texts", [PointStruct(id=at, vector=each) for at, each in enumerate(vectors)])
for at, vector in enumerate(vectors):
    assert client.query_points("texts", query=vector, limit=1).points[0].id == at
json.dump(vectors, sys.stdout)
