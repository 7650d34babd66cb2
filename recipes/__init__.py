"""Recipes for language models: pretraining, fine-tuning and what comes after them, on Hugging Face folders.

Nothing here is imported by `import loopwright`; transformers, peft and pyarrow are imported where they are used.
"""

from __future__ import annotations

__all__: list[str] = []
