"""What `kvstore demo` is made of: prompts, processes, HTTP, steps, and what it shows."""
