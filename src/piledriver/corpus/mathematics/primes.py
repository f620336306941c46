"""Primes and prime factors of the sizes that the questions use."""

from __future__ import annotations

from math import gcd

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(number: int) -> bool:
    """Whether a number is prime; exact below 3.3e24 (Miller-Rabin with the first twelve primes).

    >>> [n for n in range(30) if is_prime(n)]
    [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    """
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def prime_factors(number: int) -> list[int]:
    """The different prime factors, smallest first.

    >>> prime_factors(645090)
    [2, 3, 5, 21503]
    """
    found: set[int] = set()
    for prime in range(2, 1000):
        if number % prime == 0:
            found.add(prime)
            while number % prime == 0:
                number //= prime
    stack = [number] if number > 1 else []
    while stack:
        value = stack.pop()
        if is_prime(value):
            found.add(value)
        elif value > 1:
            divisor = _divisor(value)
            stack += [divisor, value // divisor]
    return sorted(found)


def _divisor(number: int) -> int:
    """A divisor of a composite number without small factors (Pollard's rho)."""
    for shift in range(1, 100):
        slow = fast = 2
        divisor = 1
        while divisor == 1:
            slow = (slow * slow + shift) % number
            fast = (fast * fast + shift) % number
            fast = (fast * fast + shift) % number
            divisor = gcd(slow - fast, number)
        if divisor != number:
            return divisor
    raise ArithmeticError(f"no divisor of {number} found")
