"""Hugging Face's client of inference endpoints, for which a farm is TEI."""

import json
import sys

from huggingface_hub import InferenceClient

url, key, _ = sys.argv[1:]
client = InferenceClient(base_url=url, api_key=key)
json.dump(
    [client.feature_extraction(text)[0].tolist() for text in json.load(sys.stdin)], sys.stdout
)
