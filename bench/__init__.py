"""What running with blocks costs: workloads, the engines that run them, and the tables.

Nothing is imported here, since parts of this package also run in the rival's environment.
"""
