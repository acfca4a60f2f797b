"""Everything that proposes tokens: one file per kind, one interface (`base`), one file format (`checkpoint`)."""
