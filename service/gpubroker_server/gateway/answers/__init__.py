"""What answers of several resources share: tasks, holders, devices and times as the API shows them."""
