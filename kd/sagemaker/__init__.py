"""What SageMaker needs of kd: archives of an export, and the handler of its PyTorch container."""
