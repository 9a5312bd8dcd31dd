"""From a PyTorch model to a bundle of three ONNX graphs over one blob of weights, with the written exam beside them."""
