"""Every command of halfstep with the function that it calls."""

from halfstep.cli import app


def callbacks():
    """Name to function; a command of a group has both words, as ``watch check``."""
    found = {command.callback.__name__: command.callback for command in app.registered_commands}
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            found[f"{group.name} {command.callback.__name__}"] = command.callback
    return found


def command_of(words):
    """The name of the command that ``words`` call; ``watch RUNS_DIR`` is ``watch serve``."""
    names = callbacks()
    for name in (" ".join(words[:2]), words[0], f"{words[0]} serve"):
        if name in names:
            return name
    raise AssertionError(f"no command {' '.join(words)}")
