"""The workloads: what is run, and what is compared with what."""
