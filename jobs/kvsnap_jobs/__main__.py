"""`python -m kvsnap_jobs`: the `kvsnap` command where its script is not on the path."""

from kvsnap_jobs.cli import main

if __name__ == "__main__":
    main(prog_name="kvsnap")
