"""Code that runs inside the sandbox, or starts it from inside: standard library only.

These modules are sent as text to a bare interpreter (`bootstrap.py`), so that they work where the package's own folder
cannot be read. They import nothing but each other and the standard library.

- `zygote`: one process a `Sandbox`; imports the preloaded libraries and forks a jailer for each call or session.
- `jailer`: watches one child: deadline, output, end. The only one that talks to the parent.
- `child`: how the child is made and ended.
- `jail`: what the child does to itself before it sees the model's code; `kernel`, `filters`, `syscalls` serve it.
- `runner`: runs the model's code."""
