"""What can be shown only on an accelerator; `make gpu` runs it."""
