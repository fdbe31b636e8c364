"""A client that openapi-python-client makes of /openapi.json: a job, from upload to vectors."""

import io
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

url, key, model = sys.argv[1:]
texts = json.load(sys.stdin)
place = Path(tempfile.mkdtemp())
document = place / "openapi.json"
with urllib.request.urlopen(f"{url}/openapi.json") as answer:
    document.write_bytes(answer.read())
subprocess.run(
    [
        Path(sys.executable).with_name("openapi-python-client"), "generate",
        "--path", document, "--output-path", place / "generated", "--meta", "none",
    ],
    check=True, stdout=sys.stderr,
)  # fmt: skip
sys.path.insert(0, str(place))

from generated import AuthenticatedClient
from generated.api.jobs import delete_job, get_results, list_jobs, show_job, submit_job
from generated.api.open_ai import embeddings
from generated.api.operations import list_workers, ready
from generated.models import EmbeddingsRequest, SubmitJobInputFormat
from generated.types import File

with AuthenticatedClient(url, key) as client:
    assert ready.sync(client=client).ready
    assert list_workers.sync(client=client)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    corpus = File(io.BytesIO(lines.encode()), "corpus.jsonl")
    job = submit_job.sync(
        client=client,
        body=corpus,
        model=model,
        input_format=SubmitJobInputFormat.JSONL,
        name="generated",
    )
    vectors, complete = [], False
    while not complete:
        answer = get_results.sync_detailed(job.job, client=client, start=len(vectors), wait=30)
        vectors += [json.loads(line)["embedding"] for line in answer.content.splitlines()]
        complete = answer.headers["x-complete"] == "true"
    seen = show_job.sync(job.job, client=client)
    assert (seen.state, seen.chunks_done) == ("finished", len(texts)), seen
    assert job.job in [each.job for each in list_jobs.sync(client=client).jobs]
    delete_job.sync(job.job, client=client)
    request = EmbeddingsRequest(model=model, input_=texts[:1])
    asked = embeddings.sync(client=client, body=request).data[0].embedding
assert max(abs(a - b) for a, b in zip(asked, vectors[0], strict=True)) < 1e-3
json.dump(vectors, sys.stdout)
