variable "region" {
  type        = string
  description = "AWS region, such as eu-central-1."
}

variable "name" {
  type        = string
  default     = "jspec"
  description = "Prefix of everything that is made."
}

variable "vpc_id" {
  type        = string
  description = "The VPC to live in."
}

variable "public_subnet_ids" {
  type        = list(string)
  description = "Of the load balancer: at least two availability zones."
  validation {
    condition     = length(var.public_subnet_ids) >= 2
    error_message = "A load balancer needs subnets in at least two availability zones."
  }
}

variable "private_subnet_ids" {
  type        = list(string)
  description = "Of the servers; with a NAT gateway, through which models and images come."
}

variable "allowed_cidrs" {
  type        = list(string)
  description = "Who may reach the load balancer."
}

variable "certificate_arn" {
  type        = string
  description = "ACM certificate of the name that clients use."
}

variable "image_repository" {
  type        = string
  description = "Name of the ECR repository in this account and region that holds the image."
}

variable "image_tag" {
  type        = string
  default     = "0.1.0-cpu"
  description = "An immutable tag."
  validation {
    condition     = var.image_tag != "latest"
    error_message = "Pin a tag: with \"latest\" nobody knows what runs."
  }
}

variable "api_keys_secret_arn" {
  type        = string
  description = "Secrets Manager secret whose value is the API keys, separated by commas."
}

variable "model" {
  type        = string
  default     = "smollm2-135m-instruct"
  description = "As jspec serve's --model."
}

variable "speculative_config" {
  type        = string
  default     = "{\"method\":\"ngram\",\"num_speculative_tokens\":4}"
  description = "As jspec serve's --speculative-config, JSON."
}

variable "max_model_len" {
  type        = number
  default     = 2048
  description = "Longest prompt and output, tokens."
}

variable "max_num_seqs" {
  type        = number
  default     = 8
  description = "Requests that run side by side in a server."
}

variable "cpu" {
  type        = number
  default     = 8192
  description = "CPU units of a server: 1024 are one vCPU."
}

variable "memory" {
  type        = number
  default     = 16384
  description = "Memory of a server, MiB."
}

variable "min_servers" {
  type        = number
  default     = 2
  description = "Fewest servers."
}

variable "max_servers" {
  type        = number
  default     = 8
  description = "Most servers."
}

variable "min_acceptance_rate" {
  type        = number
  default     = 0.6
  description = "The alarm goes off below it. n-gram drafts in chat are accepted less: lower it."
  validation {
    condition     = var.min_acceptance_rate > 0 && var.min_acceptance_rate < 1
    error_message = "An acceptance rate lies between 0 and 1."
  }
}

variable "log_retention_days" {
  type        = number
  default     = 30
  description = "How long logs are kept."
}

variable "alarm_email" {
  type        = string
  default     = ""
  description = "Who is told of alarms; empty makes the topic without a subscription."
}
