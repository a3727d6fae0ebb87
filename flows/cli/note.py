"""`millrace note`: shows a run's note, or replaces it."""

import argparse


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    what = "show your note on a run, or replace it; the dashboard's table of runs has it"
    parser = commands.add_parser("note", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    parser.add_argument("text", nargs="?", metavar="TEXT", help='the new note; "" removes it')


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code. Raises InputError and StorageError for what is no run, and for a note that is too long."""
    from millrace.runs.note import read_note, write_note
    from millrace.runs.record import read_run
    from storage.stores.factory import open_store

    store = open_store(arguments.run_url)
    if arguments.text is None:
        read_run(store)
        print(read_note(store))
    else:
        write_note(store, arguments.text)
    return 0
