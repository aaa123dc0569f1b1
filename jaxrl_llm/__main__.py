"""``python -m jaxrl_llm``: ``jaxrl-llm`` where the scripts of the environment are not on the path."""

from jaxrl_llm.cli import main

if __name__ == "__main__":
    main()
