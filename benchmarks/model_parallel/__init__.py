"""Steps on two processes beside plain torch, and the waiting of pipelines."""
