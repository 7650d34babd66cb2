"""Recipes beside the programs that others finetune with, and the memory of a step beside its plan."""
