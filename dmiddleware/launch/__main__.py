"""``python -m dmiddleware.launch`` runs ``ditask`` where its script is not on the path."""

from dmiddleware.launch.cli import ditask

if __name__ == "__main__":
    ditask(prog_name="ditask")
