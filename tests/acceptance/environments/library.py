import sqlite3

from agentrl import Environment, Sample, tool
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Find out from a small database who wrote a book."""

    max_turns = 3

    @tool
    async def author(self, title: str) -> str:
        """Who wrote a book.

        Args:
            title: of the book
        """
        self.books = sqlite3.connect(":memory:")
        self.books.execute("create table books (title, author)")
        self.books.execute("insert into books values ('Hunger', 'Knut Hamsun')")
        found = self.books.execute("select author from books where title = ?", [title]).fetchone()
        return found[0] if found else "not in the library"

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))

    async def close(self) -> None:
        self.books.close()
