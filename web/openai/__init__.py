"""The protocol of OpenAI's API: embeddings, files and batches."""
