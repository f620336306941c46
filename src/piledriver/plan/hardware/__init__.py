"""Accelerators, links, hosts and disks as data; the machine at hand; measured rates with their date."""
