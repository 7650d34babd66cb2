"""Tensor parallelism: Linear layers and embeddings whose weights are split over ranks, by a plan.

A plan comes from the user, from the module, from transformers, or from the graph of the module.
"""
