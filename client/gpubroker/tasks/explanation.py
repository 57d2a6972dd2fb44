"""Explanations, as notebooks show them."""

from gpubroker.wire.explanations import Explanation as Answer


class Explanation(Answer, frozen=True):
    """The reasons why a task waits, or what it is doing, as the service answered."""

    def _repr_html_(self) -> str:
        from gpubroker.notebook import html_of_explanation

        return html_of_explanation(self)
