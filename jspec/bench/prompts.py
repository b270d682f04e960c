"""Prompts written for this benchmark: (task, text).

The copy task is to repeat or lightly edit a passage or a function. Its prompts are some that
SmolLM2 135M, the default model, does answer with a copy: asked in other words it often rewrites.
"""

_TIDES = """\
The sea rises and falls twice a day on most coasts because the Moon pulls a little harder on the \
water that faces it than on the Earth as a whole, and a little less hard on the water on the far \
side. Two bulges form, and the turning Earth carries every harbour through both of them. The Sun \
adds a weaker pull of its own. When Sun and Moon stand in line, at new and full moon, the two \
pulls add up and the spring tides run high; when they stand at right angles, the neap tides \
hardly wet the upper steps. The shape of the coast matters as much as the sky: a funnel of a bay \
can lift a modest tide by ten metres, while an enclosed sea may have almost none."""

_BAKERY = """\
The bakery on Mill Street opened in 1931 and has changed hands only three times. The present \
owner, Ana Ferreira, bought it from the man who taught her to bake. She kept the brick oven, \
which takes four hours to heat, and replaced nearly everything else. On weekdays the shop sells \
about three hundred loaves before noon. Bread that is left goes to the school kitchen across the \
road, which turns it into soup and pudding. Last winter the council offered money to move the \
bakery to a new hall outside the town. Ana refused: her customers come on foot, she said, and an \
oven that has been warm for ninety years should not be allowed to go cold."""

_LIBRARY = """\
Visitors may borrow up to six books at a time for a period of four weeks. A loan can be extended \
twice unless another visitor has reserved the book. Reserved books are kept at the front desk \
for five days. Please return books in the condition in which you received them; lost or damaged \
books must be paid for. The reading room is open from nine in the morning until eight in the \
evening, and food may not be taken inside."""

_STACK = '''\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def is_empty(self):
        return len(self.items) == 0'''

_WORDS = '''\
def count_words(path):
    counts = {}
    with open(path) as file:
        for line in file:
            for word in line.lower().split():
                word = word.strip(".,;:!?")
                if word in counts:
                    counts[word] += 1
                else:
                    counts[word] = 1
    return counts'''

BUILT_IN = (
  ("chat", "What should I think about before I adopt a dog from a shelter?"),
  ("chat", "Explain to a twelve-year-old why the sky is blue in the day and red in the evening."),
  ("chat", "Write a short letter to a neighbour whose music is too loud at night."),
  ("summarise", f"Summarize the following text in three sentences.\n\n{_TIDES}"),
  ("summarise", f"Summarize the main points of this article.\n\n{_BAKERY}"),
  ("code_edit", "Raise a ValueError if the stack is empty in pop and peek. Return the whole "
                f"class.\n\n```python\n{_STACK}\n```"),
  ("code_edit", "Rename the variable counts to totals and add a docstring.\n\n"
                f"```python\n{_WORDS}\n```"),
  ("copy", f"Repeat the following text exactly, word for word:\n\n{_LIBRARY}"),
  ("copy", "Copy the following text, but write \"library card\" instead of \"front desk\":\n\n"
           f"{_LIBRARY}"),
  ("copy", f"Repeat the following text exactly, word for word:\n\n{_BAKERY}"),
  ("copy", f"Add the comment # slow to the first line.\n\n```python\n{_WORDS}\n```"),
  ("copy", "Add the comment # from the textbook to the first line.\n\n"
           f"```python\n{_STACK}\n```"),
  ("translate", "Translate into French: The train to the coast leaves at seven in the morning, "
                "and it is wise to buy a ticket the day before."),
  ("math", "A shop sells pencils in boxes of 12. A school needs 200 pencils for its pupils and 15 "
           "more for its teachers. How many boxes must it buy, and how many pencils are left?"),
)
