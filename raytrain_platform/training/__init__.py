"""The training loop, what Ray Train runs, and the job that holds the replicas together."""
