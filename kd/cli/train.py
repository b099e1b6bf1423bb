"""The old name of a module that launchers started."""

if __name__ == "__main__":
    raise SystemExit(print("python -m kd.cli.train is now: python -m kd train CONFIG") or 2)
