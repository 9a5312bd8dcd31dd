"""What is deployed: translation from three ONNX graphs with numpy and ONNX Runtime, and the proof that they are right."""
