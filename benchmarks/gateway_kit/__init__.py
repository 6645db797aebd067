"""The gateway benchmark's parts: a workload, an engine that costs nothing, a client, a floor to compare with."""
