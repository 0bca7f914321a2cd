"""The member's own policy, its rules, and the verdict of each rule on a job."""
