"""What several sources share: web archives, mail, repositories, records and rows."""
