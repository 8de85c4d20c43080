"""Code that runs inside the sandbox, or starts it from inside: standard library only.

These modules are sent as text to a bare interpreter (`bootstrap.py`), so that they work if the package's own folder
cannot be read. They import only each other and the standard library.

- `zygote`: one process per `Sandbox`; imports the preloaded libraries and forks a jailer for each call or session.
- `jailer`: watches one child: deadline, output, end. Only the jailer communicates with the parent.
- `child`: starts and ends the child.
- `jail`: the child confines itself before it gets the model's code, with `kernel`, `filters` and `syscalls`.
- `runner`: runs the model's code."""
