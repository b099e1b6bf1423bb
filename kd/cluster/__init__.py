"""Other machines: hosts that decode on a Ray cluster, jobs and endpoints on SageMaker."""
