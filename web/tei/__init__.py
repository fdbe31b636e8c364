"""The protocol of Text Embeddings Inference."""
