"""OpenAI's client for Python: embeddings by default in base64, and the list of models."""

import json
import sys

import openai

url, key, model = sys.argv[1:]
with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
    assert model in [each.id for each in client.models.list()]
    answer = client.embeddings.create(model=model, input=json.load(sys.stdin))
json.dump([each.embedding for each in answer.data], sys.stdout)
