"""Runs jobs on Kubernetes: the kinds ElasticJob, ScaleOut and ScaleIn, and the operator that keeps their promises."""
