"""Chat templates: detect their format, render prompts, verify continuations, decode output."""
