"""Text to ids and back, one module per family of tokenizers, on the files that transformers reads and writes."""
