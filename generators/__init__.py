"""The ground floor: hyperparameters in, trained weights out. Knows no files of ours, no Ray, no Hub."""
