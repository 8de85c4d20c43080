import time

from agentrl import Environment, Message, Sample, tool


class Simulator:
    """Stands for a simulator that takes a moment to come up."""

    def __init__(self) -> None:
        self.speed = 0
        self._warm_up()

    def _warm_up(self) -> None:
        time.sleep(0.4)

    def set_speed(self, speed: int) -> str:
        self.speed = max(0, min(speed, 100))
        return f"{self.speed} km/h"


class Env(Environment):
    """Drive a simulated car at the speed that the task asks for."""

    max_turns = 4

    async def reset(self, sample: Sample) -> list[Message]:
        self.car = Simulator()
        return await super().reset(sample)

    @tool
    async def drive(self, speed: int) -> str:
        """Set the car's speed.

        Args:
            speed: kilometres an hour
        """
        return self.car.set_speed(speed)

    async def reward(self, sample: Sample) -> float:
        return 1.0 - abs(self.car.speed - int(sample.label)) / 100
