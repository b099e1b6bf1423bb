"""SageMaker: requests, jobs of several hosts, the archive of an export."""
