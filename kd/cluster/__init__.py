"""Use of other machines: decoding on a Ray cluster, jobs and endpoints on SageMaker."""
