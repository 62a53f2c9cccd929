"""MLflow: the only package that imports it, and the only writer of a run."""
