"""The half of the local backend that runs in the zygote and inside the namespaces; standard library only."""
