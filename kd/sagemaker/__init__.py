"""SageMaker: requests, jobs of several hosts, archives of an export, the handler of its PyTorch container."""
