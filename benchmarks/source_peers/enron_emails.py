"""What the original used for Enron: mail-parser."""


def peer(content: bytes) -> str:
    import mailparser

    return mailparser.parse_from_bytes(content).body


CASES = [f"enron-emails/maildir/allen-p/_sent_mail/{name}" for name in ("1_", "10_", "100_", "101_", "102_", "1003_")]
