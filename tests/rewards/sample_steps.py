"""Functions that value steps, for the tests: good ones, and ones that answer nonsense."""


def words(problem, completion):
    """Each word is a step, worth its length."""
    end = 0
    found = []
    for word in completion.text.split(" "):
        end += len(word)
        found += [(end, len(word))] if word else []
        end += 1
    return found


def in_batches(problems, completions):
    """Every token of every completion is a step of its index."""
    return [[(at, at) for at in range(len(completion.tokens))] for completion in completions]


def picky(problem, completion):
    """Nothing good of an empty text."""
    return [(len(completion.text), 1.0)]
