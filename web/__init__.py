"""The farm by HTTP: jobs and operations, the OpenAI and TEI protocols, metrics."""
