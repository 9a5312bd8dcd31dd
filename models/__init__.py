"""The Transformer in PyTorch: token ids in, logits and caches out. Knows no text and no ONNX."""
