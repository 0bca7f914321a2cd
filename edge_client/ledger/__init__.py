"""The privacy ledger of one data set: records, budget, receipts, and their verification."""
