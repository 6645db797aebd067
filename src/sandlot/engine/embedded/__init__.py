"""The embedded engine: a Llama-family model run with numpy alone, batched, with a prefix cache and exact logprobs."""
